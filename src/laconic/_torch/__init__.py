"""The one door to torch's private parts.

Whatever starts with an underscore in torch, or is not documented, may go with torch's next release. It is used in this package
alone: `parts.py` lists every such name with the reason, each function here uses a few of them, and a torch that lacks one is
met by a sentence that says which, what for, and in which version.
"""
