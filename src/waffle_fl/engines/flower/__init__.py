"""The engine for real machines: Flower carries the messages, the algorithms are the simulator's.

messages  what a message holds, as bytes       rows    a site's row: trained and examined as in the simulator
course    the server's side of one run         post    who is online, and messages that survive a restart
"""
