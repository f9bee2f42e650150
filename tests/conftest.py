from hypothesis import settings

# A busy machine is no failure of the property.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
