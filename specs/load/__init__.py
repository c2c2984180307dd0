"""From a TOML file to a `Spec`, or to every problem at once."""
