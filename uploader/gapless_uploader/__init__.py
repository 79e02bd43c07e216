"""The uploader and the `gapless` command.

Data flows one way: `tail -> attempt -> reader -> history -> adapt -> pipeline -> sink -> state`. Neither torch nor
the training side is ever imported here.
"""
