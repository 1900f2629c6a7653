"""What all parties agree on. Pure: no Ray, no NIXL, no sockets."""
