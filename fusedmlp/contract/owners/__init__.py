"""Owners of a parameter: frameworks that reduce its `.grad` over ranks when backward ends, a file for each.

Each file has NAME and ADVICE (what to use instead), for messages; `present()`, whether the framework may own a
parameter in this process, which every forward asks; and `owns(param)`.
"""
