"""Should this agent join? Finished runs -> statistics -> words -> one page that a physician can read and print.

bootstrap      how sure a figure is, and a difference between two methods on the same samples
distances      how unlike the agents are, before any training
study          which runs answer the question, and what they say
words          verdicts in plain English
charts, page   the page
"""
