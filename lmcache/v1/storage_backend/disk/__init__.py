"""The disk tier's parts: directories and their owners, chunk files, index, queue, writer."""
