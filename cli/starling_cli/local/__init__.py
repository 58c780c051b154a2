"""`starling up`: the plan of the operator with processes of this machine in place of pods.

The children that the plan wants are files in a private folder (`store`), StatefulSets become agent processes (`workload`, `launch`,
`pod`), their reports are read as the operator reads them (`reports`), and `observe` makes of it what `plan` decides from.
"""
