"""Computes from NetworkPolicy objects which pods may reach which others, as a network plugin does, as a pure function.

    source ── isolated for egress? a rule lets it out ──┐
    target ── isolated for ingress? a rule lets it in ──┴─► may reach

https://kubernetes.io/docs/concepts/services-networking/network-policies and the API reference of networking.k8s.io/v1. A pod
that no policy selects for a direction is open in it; one that is selected is closed, but for what some rule allows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

type Policy = Mapping[str, Any]

NAME = "kubernetes.io/metadata.name"
"""Label that every namespace has."""


@dataclass(frozen=True)
class Pod:
    """One end of a connection."""

    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    """Container ports by name."""
    address: str = "10.244.0.9"


@dataclass(frozen=True)
class Outside:
    """The other end, if it is not a pod."""

    address: str = "203.0.113.7"


type End = Pod | Outside


def may_reach(policies: Sequence[Policy], source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection from source to this port of target is let through."""
    out = _open(policies, "Egress", source, target, target, port, protocol)
    return out and _open(policies, "Ingress", target, source, target, port, protocol)


def _open(policies: Sequence[Policy], way: str, own: End, peer: End, target: End, port: int, protocol: str) -> bool:
    """Whether the policies that select `own` let `peer` through in that direction."""
    if isinstance(own, Outside):
        return True
    selecting = [policy for policy in policies if _isolates(policy, way, own)]
    if not selecting:
        return True
    rules, side = way.lower(), {"Ingress": "from", "Egress": "to"}[way]
    return any(
        _peered(rule.get(side), peer, policy["metadata"]["namespace"])
        and _ported(rule.get("ports"), target, port, protocol)
        for policy in selecting
        for rule in policy["spec"].get(rules) or ()
    )


def _isolates(policy: Policy, way: str, pod: Pod) -> bool:
    spec = policy["spec"]
    implied = ["Ingress", *(["Egress"] if "egress" in spec else [])]
    if policy["metadata"]["namespace"] != pod.namespace or way not in spec.get("policyTypes", implied):
        return False
    return matches(spec.get("podSelector", {}), pod.labels)


def _peered(peers: Iterable[Mapping[str, Any]] | None, end: End, namespace: str) -> bool:
    """No peers at all means everybody."""
    return not peers or any(_is(peer, end, namespace) for peer in peers)


def _is(peer: Mapping[str, Any], end: End, namespace: str) -> bool:
    if (block := peer.get("ipBlock")) is not None:
        address = ip_address(end.address)
        excepted = any(address in ip_network(part) for part in block.get("except", ()))
        return address in ip_network(block["cidr"]) and not excepted
    if isinstance(end, Outside):
        return False
    if "namespaceSelector" in peer:
        here = matches(peer["namespaceSelector"], {**end.namespace_labels, NAME: end.namespace})
    else:
        here = end.namespace == namespace
    return here and matches(peer.get("podSelector", {}), end.labels)


def _ported(ports: Iterable[Mapping[str, Any]] | None, target: End, port: int, protocol: str) -> bool:
    """No ports at all means every port. A name is one of the target's container ports."""
    if not ports:
        return True
    for entry in ports:
        if entry.get("protocol", "TCP") != protocol:
            continue
        first = entry.get("port")
        if isinstance(first, str):
            first = target.ports.get(first, 0) if isinstance(target, Pod) else 0
        if first is None or first <= port <= entry.get("endPort", first):
            return True
    return False


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """A LabelSelector; the empty one matches everything."""
    fixed = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return fixed and all(
        _holds(match_expression, labels) for match_expression in selector.get("matchExpressions") or ()
    )


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return key in labels and labels[key] in values
        case "NotIn":
            return key not in labels or labels[key] not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case other:
            raise ValueError(f"operator {other} of a label selector; there are In, NotIn, Exists and DoesNotExist")
