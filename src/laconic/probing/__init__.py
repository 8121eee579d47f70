"""How fast a network is: collectives, the link between hosts, who is slow, measured on a process group."""
