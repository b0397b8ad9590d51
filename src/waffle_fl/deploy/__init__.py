"""From a simulation to real machines: a folder of keys and settings, Flower's processes, and our two apps in them.

folders     server.toml and site.toml                keys       a CA, certificates and node keys
policy      what a site lets out                     holdings   a site's data, and what it tells of it
store       what a site must not lose                clientapp  a site's end of a message
survey      what the server asks before round one    serverapp  the server's end: rounds, records, resume
launcher    only our own apps run, at either end     processes  Flower's commands, started and watched
"""
