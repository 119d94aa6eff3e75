// Empty: a package with an assembly file may declare functions without a body, which the linkname in the test needs.
