"""The code under test: imported, described, called and restored, in this process or in a separate one."""
