"""Should this agent join? Turn finished runs into statistics, sentences and one printable page for physicians.

bootstrap              confidence intervals of a metric and of the difference between two methods
distances              distances between the agents' data before training
study                  plan the runs and compare their results
verdict_text           the verdict sentences
charts, markup, page   the HTML page
"""
