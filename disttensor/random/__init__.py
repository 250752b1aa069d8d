"""Random numbers by position in the program: the counter, factories that are born sharded, the
generator itself.

Not here: which torch function draws what (``ops.random``).
"""
