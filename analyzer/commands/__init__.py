"""One module per subcommand: ``add_arguments`` declares it, ``run`` does it and returns the exit code."""
