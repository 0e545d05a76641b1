//! Errors of this crate.

use std::path::PathBuf;

use rtvirtio_spec::SpecErrors;

/// Errors of Pacemaker's tools, of the cluster file, and of applying a contract.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PacemakerError {
    /// A tool of Pacemaker's is not there.
    #[error("cannot run {program}: is pacemaker-cli-utils installed?")]
    NoTool {
        /// Name of the tool.
        program: String,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// A tool of Pacemaker's refused.
    #[error("{command}: {message}; does the cluster run on this node (`crm_mon -1`)?")]
    Tool {
        /// Command line of the tool.
        command: String,
        /// Standard error of the tool, else its output or exit status.
        message: String,
    },
    /// A tool of Pacemaker's does not end.
    #[error("{command} did not end within {waited} s: does the cluster answer (`crm_mon -1`)?")]
    Slow {
        /// Command line of the tool.
        command: String,
        /// Timeout, in seconds.
        waited: u64,
    },
    /// The output of a Pacemaker tool is too long.
    #[error("{command} printed more than {most} bytes: is it Pacemaker's (`command -v`)?")]
    TooMuch {
        /// Command line of the tool.
        command: String,
        /// Limit, in bytes.
        most: usize,
    },
    /// The output of a tool has an unexpected form.
    #[error("{command} printed what is not understood: {text}")]
    Output {
        /// Command line of the tool.
        command: String,
        /// Output, or the part that is not understood.
        text: String,
    },
    /// The cluster file is invalid.
    #[error("{}: {message} (docs/reference/fleet-toml.md has the keys)", .path.display())]
    File {
        /// Path of the cluster file.
        path: PathBuf,
        /// Description with line and column where known.
        message: String,
    },
    /// A spec cannot be read or is invalid.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
    /// A step on the host.
    #[error(transparent)]
    Step(#[from] rtvirtio_workflow::Error),
    /// The host cannot be read.
    #[error(transparent)]
    Host(#[from] rtvirtio_kernel::HostError),
    /// The journal cannot be read.
    #[error(transparent)]
    Apply(#[from] rtvirtio_apply::ApplyError),
    /// A file of the state directory.
    #[error("{}", .path.display())]
    State {
        path: PathBuf,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// Some resources could run on no node once utilization counts.
    #[error(
        "nothing is written, because utilization would then count, and no node says how much it has of what these take: {what}. Set autoset_utilization_cpu, \
         autoset_utilization_host_memory and autoset_utilization_hv_memory of each VirtualDomain to false and remove the utilization, or publish \
         what the nodes have by a clone of ocf:heartbeat:NodeUtilization"
    )]
    NoCapacity {
        /// Resources and attributes, separated by semicolons.
        what: String,
    },
    /// The VM's settings are held by another program.
    #[error("{resource}: {why}")]
    HeldElsewhere {
        /// Name of the VM's resource.
        resource: String,
        /// Name of that program, and the remedy.
        why: String,
    },
    /// The spec cannot be had on this node.
    #[error(transparent)]
    NoFile(rtvirtio_workflow::Error),
    /// A parameter, or the file that it names, is wrong on every node.
    #[error(transparent)]
    Configured(rtvirtio_workflow::Error),
    /// The contract could not be applied or put back as a whole.
    #[error("{resource}: {what}")]
    NotVerified {
        /// Name of the VM's resource.
        resource: String,
        /// Difference found, in words.
        what: String,
    },
}
