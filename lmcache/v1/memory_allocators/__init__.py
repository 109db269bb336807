"""Allocators over one kind of memory each."""
