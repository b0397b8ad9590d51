"""The engine for real machines: Flower transports the messages; the algorithms are those of the simulator.

messages      content of a message, encoding and validation
server_run    the server's side of one run
site_trainer  training and evaluation of one agent, as in the simulator
transport     sites that are online, and message exchange that survives restarts
"""
