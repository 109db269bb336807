"""Host memory, and what a device backend must offer. Importing it opens no device."""
