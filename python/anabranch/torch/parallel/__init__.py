"""Level 3: how a layer is spread over a process group, and the exchange of tokens between ranks."""
