"""Exit codes of our own."""

# Of a process that failed because another one did: `laconic run` passes on the first one's instead.
LOST_A_PEER = 217
