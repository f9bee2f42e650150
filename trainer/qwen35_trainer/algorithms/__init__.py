"""Advantages, policy losses, KL estimators, aggregation and off-policy corrections as pure tensor functions.

    rewards ──► advantages ──► losses ───────────────┐
    behaviour log-probs ──► corrections ──► weights ─┼─► aggregation ──► loss, metrics
    reference log-probs ──► kl ──────────────────────┘   combined by objective.py

Advantages, losses, KL estimators, aggregations and corrections have one registry each, in the module that defines them.
A function is registered under the value that selects it in the manifest. N is the number of samples, T the number of
response positions (right padded), and `mask` (N, T) is 1 on tokens that train. Advantages are float32. The other
functions compute in float32, or in float64 if their inputs are float64. Entries where the mask is 0 affect neither the
loss nor its gradient, even if they are NaN.
"""
