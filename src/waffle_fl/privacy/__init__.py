"""Rounds in which the server sees distances and a weighted sum, and no single update.

ring           numbers as words of a ring of integers, in which masks cancel exactly
keys           key pairs of a job, pairwise secrets, keys derived from them, streams of words
shamir         shares of a secret
sketch         few secret numbers that preserve the distance of two updates
exact_product  the same distance without error, with a third agent as dealer
contributors   the effective number of contributors, and the floors of the sites
messages       what the agents and the server send
agent, server  the two sides of a round, without input and output

The modules `messages` and `server` hold no keys of agents and import none. docs/privacy.md has the protocol.
"""
