"""`starling up`: the plan of the operator with processes of this machine in place of pods.

The children that the plan wants are files in a private folder (`children`). StatefulSets become agent processes (`stateful_sets`,
`launch`, `pod`), whose reports are read as by the operator (`reports`). The Deployment of `spec.router` becomes one router process
(`routers`, `router_launch`), which reads the agents' URLs in a file. `observe` makes of all that the input of `plan`.
"""
