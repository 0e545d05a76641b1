//! Metadata of the resource agent.

/// OCF Resource Agent API 1.1, section 3.6.
pub const METADATA: &str = r#"<?xml version="1.0"?>
<!DOCTYPE resource-agent SYSTEM "ra-api-1.dtd">
<resource-agent name="contract" version="1.0">
<version>1.1</version>
<longdesc lang="en">
Holds the contract of a VM by rtvirtio: applied after the VM has started, journaled, verified by every monitor, restored when another program has changed it, put back when the VM is to stop. Order it after the VM's resource and colocate it with that; `rtvirtio-pacemaker constraints` writes both.
</longdesc>
<shortdesc lang="en">The contract of a VM (rtvirtio)</shortdesc>
<parameters>
<parameter name="spec" unique="0" required="1">
<longdesc lang="en">The spec file with the VM, on every node.</longdesc>
<shortdesc lang="en">spec file</shortdesc>
<content type="string"/>
</parameter>
<parameter name="resource" unique="0" required="0">
<longdesc lang="en">Name of the VM's resource: the contract's journal lies below contracts/NAME in the state directory. Without it the name of this resource.</longdesc>
<shortdesc lang="en">the VM's resource</shortdesc>
<content type="string"/>
</parameter>
<parameter name="disk" unique="0" required="0">
<longdesc lang="en">Also plan and apply the kernel's settings of the disk. They are of the whole device, so only one contract for each device and node may ask for it.</longdesc>
<shortdesc lang="en">apply the disk's settings too</shortdesc>
<content type="boolean" default="false"/>
</parameter>
<parameter name="state_dir" unique="0" required="0">
<longdesc lang="en">rtvirtio's state directory.</longdesc>
<shortdesc lang="en">state directory</shortdesc>
<content type="string" default="/var/lib/rtvirtio"/>
</parameter>
</parameters>
<actions>
<action name="start" timeout="60s"/>
<action name="stop" timeout="60s"/>
<action name="monitor" timeout="30s" interval="10s" depth="0"/>
<action name="validate-all" timeout="20s"/>
<action name="meta-data" timeout="5s"/>
</actions>
</resource-agent>
"#;
