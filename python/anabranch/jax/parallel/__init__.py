"""Level 3: how a layer is spread over a mesh, and the exchange of tokens between devices."""
