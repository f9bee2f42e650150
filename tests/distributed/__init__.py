"""A package, so that its processes end with its last test (scope "package")."""
