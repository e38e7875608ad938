"""Report about runs or a sweep as one HTML file, for `flsim report`."""
