"""The packhorse command: one small module a subcommand, imported when used."""
