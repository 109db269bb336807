"""The in-process engine; the version in the path is upstream's."""
