"""Which strategy, for which model, over which link: answered before anything is trained."""
