"""Planner: `plan(observed) -> Decision` decides everything that the operator does about one InferenceService.

The planner is pure. It imports no Kubernetes client and no clock: the time is part of `Observed`. It remembers nothing: its memory
is the children, the pods and the last status. So an operator that was killed at any point leaves a state like any other.

    Observed                                          Decision
    service, children, pods, agents' reports,  ────▶  create, apply, delete, status, events,
    cordoned nodes, other services' gangs, now        calls to leaders, requeue_after

A group is one copy of the model: a StatefulSet of `nodes` pods and a headless Service. Groups are created and deleted, never
updated.
A group is a gang if its nodes hold ranks that step together: a pod that fails or drains then takes the others along.
The target revision is that of the present spec. `current` groups are of it, `old` groups are of another one. While a canary is
tried, and after it was rolled back, the target is the revision that served before; the canary's groups are neither.

Steps of `plan`, each in the module of that name:

    refusals     A spec that cannot be carried out changes no group. Only drains, lost pods and the budget go on.
    revision     Finds the stored revision with the spec's hash, or creates one. The hash covers the fields that need new pods.
    canary       Tries the spec's revision on a part of the requests, if the spec asks for that, and rolls it back if it is worse.
    group        Reads the groups: StatefulSet, pods, reports, record in the last status.
    readiness    A current group is ready if the pods it needs are Ready, and their agents report this revision's configuration,
                 weights and topology, and a token through their endpoint and through the Service. Old ones: Ready pods.
    failure      Finds failures that a restart can heal, and groups that do not come up by themselves. The target revision is broken
                 while one of its groups does not.
    rollout      Decides which groups to create and which to remove: scaling, revisions, evictions. See the formulas.
    gangs        A group of which only some pods are scheduled releases their nodes when a gang of another service waits as well.
    recovery     Deletes pods of a failed group, so that they are recreated: all of a gang, else one. Pauses of 0, 10, 20, 40, ...
                 300 s, at most restartBudget times in windowSeconds.
    elastic      Takes the next step of each elastic group towards the wanted size, one group after the other.
    disruption   Opens and closes the PodDisruptionBudget.
    verdict      Sums it all up in one state, reason and message; conditions, status and events follow from it.
    requeue      Says when to decide again although nothing may have changed.

Formulas, with R = replicas (0 if suspended), S = maxSurge, U = maxUnavailable. A group drains when a pod of it was evicted:

    keep(n)      groups (or pods) of n that evictions leave: 1 if n = 1, U = 0 and cordons are seen; else max(0, n - max(1, U))
    E            groups created ahead of an eviction: min(S, max(0, cordoned + keep(R) - R)); 0 if R = 0, all
                 are to sleep, or old groups exist
    create       min(R + E - current, R + S - all); `all` counts groups that are being removed, `current` leaves out those that
                 drain. 0 if the target revision is broken and old groups exist. Groups of several nodes: one at a time, and none
                 while another one has a pod without a node that it needs to serve
    remove       draining groups, but for old ones while the target revision is broken; current groups beyond R + E; old groups as
                 follows, or all if R = 0
    old, idle    not ready: all of them; if the target revision is broken, only those beyond R. While fewer than R - U are ready,
                 not those that served 30 s ago, or whose other pods serve on
    old, ready   ready groups - (R - U), where S = U = 0 counts as U = 1; ready groups - R if the target revision is broken
    spare        ready groups - keep(R); in pods, with keep(R * nodes), where pods drain one by one; 1 if a group is on a cordoned
                 node and none is coming up
    budget       minAvailable = ready pods - spare; all live pods if spare <= 0

With a canary at step k, whose weight is w(k) percent, and w(0) = 0:

    begins       by an edit that makes another revision, where groups of the one before have served. k = 0
    groups       max(1, ceil(R * w(k) / 100)), on top of all others; those of step k + 1 once its time is over, or k = 0 and each
                 router has reported that it knows of the canary
    next step    its groups are ready, and of step k the time is over, no gate fails and each router has reported since it began.
                 Never while paused, with one error of fewer than 1000 requests that is too many, with under half of 20 or more
                 placed requests answered, or with no tokens compared where the spec says so. After the last step it has passed: its
                 revision becomes the target
    gates        errors(canary) - errors(stable) > maxErrorPercent, with 2 errors or more; at the step's end median first
                 token(canary) > maxFirstTokenRatio * that of stable, of 20 answers or more each; one answer with other tokens,
                 where compared. Sums over routers since the step began
    rolled back  a gate fails, or a group of it does not come up. The phase is stored, then all its groups go. It is not tried again
                 before the revision or spec.rollout.canary changes
    routers      are told w(k); 0 while the spec is refused, and from when it is rolled or taken back until its last pod is gone

Groups go in this order: not ready, on a cordoned node, fewest open streams, youngest, highest number.

Invariants:

- Groups are created up to R + S in all, and a canary's on top. A rollout leaves R - U ready groups, if there were as many; R while
  its revision is broken, and while it is a canary.
- A settled service gets an empty decision: nothing to create, delete, call or report, and nothing that differs to apply.
- Each deletion names the UID that was seen. Each call to a leader is of an operation that the status held when it was read.
- Only the status is written back: the spec belongs to the user and to autoscalers.
"""
