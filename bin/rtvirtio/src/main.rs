//! rtvirtio command line.
fn main() -> anyhow::Result<()> {
    let a: Vec<String> = std::env::args().collect();
    rtvirtio_lab::twin::serve(&rtvirtio_lab::twin::ServeConfig { profile: a[1].clone(), size: a[2].parse()?, seed: 1, mount: a[3].clone().into() })?;
    Ok(())
}
