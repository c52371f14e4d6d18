"""Level 3: expert parallelism over a process group, and the exchange of tokens between ranks."""
