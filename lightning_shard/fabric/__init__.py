"""The strategy of Fabric."""
