//! `-o table|json|yaml`, and logging.

use serde::Serialize;
use std::io::{ErrorKind, Write as _};

/// How a result is printed.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Format {
    /// Output format
    #[arg(short = 'o', long = "output", value_enum, default_value_t = Kind::Table)]
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// For people
    Table,
    /// JSON
    Json,
    /// YAML
    Yaml,
}

impl Format {
    /// Prints `value` for programs, or what `text` makes of it for people.
    pub fn print<T: Serialize>(self, value: &T, text: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
        write(&match self.kind {
            Kind::Table => text(value),
            Kind::Json => format!("{}\n", serde_json::to_string_pretty(value)?),
            Kind::Yaml => serde_saphyr::to_string(value)?,
        })
    }
}

/// Writes `text` to standard output, where `print!` would panic if that is not possible. A reader that has closed its pipe
/// (`| head`) has seen enough: that is no error.
pub fn write(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(anyhow::Error::new(error).context("cannot write to standard output"))
        }
        _ => Ok(()),
    }
}

/// Writes a line to standard error, if that is possible: there is nowhere else to say that it is not.
pub fn note(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Rows in aligned columns, without borders.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(head.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    let lines: Vec<String> = table.lines().map(|l| l.trim_end().to_string()).collect();
    format!("{}\n", lines.join("\n"))
}

/// Logs to standard error at kube-proxy's level `v`; `RUST_LOG` overrides it.
pub fn start_logging(v: u8) {
    let level = match v {
        0..=3 => "info",
        4..=5 => "debug",
        _ => "trace",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(format!("warn,proxy={level}")));
    // A second call (tests in one process) keeps the first logger.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        // It would tell of a line that cannot be written by `eprintln!`, which panics if standard error is what is full or gone.
        .log_internal_errors(false)
        .try_init();
}

/// An error with its causes, each said once: many errors already quote their cause.
pub fn error_text(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn causes_are_said_once() {
        let error = anyhow!("no such file").context("cannot read x: no such file").context("check failed");
        assert_eq!(error_text(&error), "check failed: cannot read x: no such file");
    }

    #[test]
    fn columns_are_aligned_without_trailing_blanks() {
        let text = table(&["A", "LONG"], &[vec!["wide cell".into(), "x".into()], vec!["b".into(), "y".into()]]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0].find("LONG"), lines[1].find('x'), "{text}");
        assert!(lines.iter().all(|l| l.trim_end() == *l));
    }
}
