"""The models and clusters that ship with the package, one YAML file each. ``planner.loading`` reads them by name."""
