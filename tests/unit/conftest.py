"""How hypothesis tests run: with no limit by the wall clock, which measures the machine, and a bearable count."""

from hypothesis import HealthCheck, settings

settings.register_profile("warmroute", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("warmroute")
