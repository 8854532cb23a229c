"""Which row comes when: keyed permutations, shuffle settings, and the rows of one rank.

Values in, values out: no files, no event loop, no log. What is here decides D, the order that the promises are about.
"""
