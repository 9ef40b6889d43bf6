"""LongStraw inside verl: engine, rollout, sampler, agent loop, configuration and CPU platform.

Everything here translates between verl's types and the core; no mathematics lives here. The entry
point is `plugin`, which verl imports by itself. Importing this package imports nothing of verl.
"""
