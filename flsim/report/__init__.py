"""One HTML file about runs or a sweep: `flsim report`."""
