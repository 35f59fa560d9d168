"""The code under test: imported, described, called and restored, here or in a process of its own."""
