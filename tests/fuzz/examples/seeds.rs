//! Writes the seeds of a target into a folder: `seeds TARGET FOLDER`.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, folder] = &args[..] else { panic!("usage: seeds TARGET FOLDER") };
    let target = shine_fuzz::targets().into_iter().find(|target| target.name == name.as_str());
    for (number, seed) in target.expect("a target of that name").seeds.iter().enumerate() {
        std::fs::write(Path::new(folder).join(format!("seed-{number}")), seed)?;
    }
    Ok(())
}
