"""What is noted when manyheads is first imported, before torch is."""

import os

PROCESS = os.getpid()  # a fork of it has another number, and none of the threads of PyTorch's pool
