"""From a simulation to real machines: folders of keys and settings, Flower's processes, and our two apps in them.

folders      server.toml, site.toml and secrets         membership   founding, joining, new keys, revoking
keys         a CA, certificates, node and operator keys  signing      requests that a site obeys
policy       a site's rules                              exposure     models that single out rows
holdings     a site's data, and what it tells of it      store        a site's states and its ledger
site         a site's answers                            clientapp    the site's end of a message
survey       questions before round one                  serverapp    the server's end: rounds, records, resume
gate         what the server's two ports let through     launcher     Flower's SuperLink and SuperNode, adapted
executor     runs our apps, forked, for Flower's tasks   processes    all processes of an end, watched together
jobs         a submitted run and its journal             link         the operator's commands towards the server
overview     how sites and jobs stand                    watching     the live page and its metrics
"""
