"""Should this agent join? Turn finished runs into statistics, sentences and one printable page for physicians.

bootstrap              confidence intervals of a metric and of the difference between two methods
distances              distances between the agents' data before training
coalitions             cross-validate groups of agents
shapley                coefficients of each partner's contribution
budget                 what a study of images may cost, and what is reduced beyond it
measurement            how partners are measured within the budget
partners               which partners help each agent, and the group that it should train with
study                  plan the runs and compare their results
verdict_text           the verdict sentences
recommendation         the recommendation per agent, and the share of agents that gain
charts, markup, page   the HTML page
"""
