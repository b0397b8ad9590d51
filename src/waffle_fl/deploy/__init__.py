"""Deployment on real machines: folders with keys and settings, Flower's processes, and the two apps that run in them.

settings_files   server.toml, site.toml, secrets           membership       create a federation, join, rotate, revoke
keys             CA, certificates, node and operator keys  signing          signatures of requests
policy           a site's rules                            exposure         models that single out training rows
site_data        a site's data and its summaries           site_store       a site's states and its ledger
site             a site's replies                          client_app       the site's Flower app
survey           questions before round 1                  server_app       the server's Flower app: rounds, records
gateway          access control of the server's two ports  flower_launcher  Flower's SuperLink and SuperNode, adapted
executor         runs the apps for Flower's tasks          processes        start and watch processes
jobs             a submitted run and its log               control_client   the operator's commands to the server
overview         state of sites and jobs                   live_page        the live page and its metrics
preflight        checks before a run                       dry_run          one local round that prints what would leave
local_cluster    a federation on one machine               demo             the demonstration
"""
