"""Advantages, policy losses, KL estimators, aggregation and off-policy corrections as pure tensor functions.

    rewards ──► advantages ──► losses ───────────────┐
    behaviour log-probs ──► corrections ──► weights ─┼─► aggregation ──► loss, metrics
    reference log-probs ──► kl ──────────────────────┘   combined by objective.py

Each of these five kinds of functions has a registry, which its module fills at import. A function is registered under the
value that selects it in the manifest. N is the number of samples, T the number of response positions (right padded), and
`mask` (N, T) is 1 on tokens that train. Math is float32 (float64 for float64 inputs). Entries where the mask is 0 affect
neither results nor gradients, even if they are NaN.
"""
