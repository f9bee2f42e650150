"""A cluster in memory and in virtual time: the API server, the controllers that the operator's objects meet, and KubeRay.

    story (a test) ──► VirtualApi ──┐                     ┌─► garbage collector, quotas, taints
                                    ├─► ApiServer ─ events ─► nodes: scheduler and kubelets
    main.operate ─ RestClient ──────┘                     ├─► KubeRay ─► the scripted trainer
                                                          ├─► Kueue, in stories that start it
                   over a transport without sockets       └─► watches of the operator

Everything runs in one event loop whose clock jumps to the next timer. A story takes milliseconds, whatever its back-offs,
grace periods and deadlines are. tests/controlplane/test_conformance.py sends the same requests to this server and to the real
one, and stories that are marked `real` run on both.
"""
