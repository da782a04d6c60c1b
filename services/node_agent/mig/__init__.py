"""MIG: instances, layouts, and the steps that change a layout."""
