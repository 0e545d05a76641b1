#!/bin/sh
# Shows what the HA manager of Proxmox VE makes of `rtvirtio fleet --proxmox`, without a Proxmox VE: the commands go through the schemas of its
# own command line, and what they write goes to its own CRM and LRM in the simulator of its tests, in which each node is switched off once. Every
# VM must end where the fleet's admission has found room for it. Nodes, VMs and fencing are the simulator's; pmxcfs and QEMU take no part.
# Usage: scripts/proxmox.sh [DIRECTORY]      With a directory sources and Perl modules stay there for the next run: pve-ha-manager, pve-common,
# pve-cluster. What is missing is cloned from git.proxmox.com. Needs git, perl, apt-get, and the network once.
set -eu
cd "$(dirname "$0")/.."
for program in git perl apt-get dpkg; do
    command -v "$program" >/dev/null || { echo "proxmox: $program is missing" >&2; exit 1; }
done
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT INT TERM
keep=${1:-$temporary}
mkdir -p "$keep"
keep=$(cd "$keep" && pwd)
for source in pve-ha-manager pve-common pve-cluster; do
    [ -d "$keep/$source" ] || git clone -q "https://git.proxmox.com/git/$source.git" "$keep/$source"
done
# Modules that they load, in a directory of their own.
if [ ! -d "$keep/perl" ]; then
    mkdir "$temporary/debs"
    (
        cd "$temporary/debs"
        apt-get download -q libtimedate-perl libfilesys-df-perl libencode-locale-perl libdevel-cycle-perl libhttp-message-perl libhttp-date-perl \
            libnet-ip-perl libnet-ssleay-perl liburi-perl libio-html-perl liblwp-mediatypes-perl libclone-perl liblinux-inotify2-perl \
            libcommon-sense-perl libstring-shellquote-perl libjson-perl >/dev/null 2>&1
        for deb in *.deb; do dpkg -x "$deb" "$keep/perl"; done
    )
fi
# The last commit before groups became rules is Proxmox VE 8's.
eight=$temporary/pve-ha-manager-8
mkdir "$eight"
git -C "$keep/pve-ha-manager" archive "$(git -C "$keep/pve-ha-manager" rev-list -1 --before=2025-06-01 HEAD)" src | tar x -C "$eight"
mkdir -p "$temporary/lib/PVE/Cluster"
awk -f "$keep/pve-cluster/src/PVE/Cluster/IPCConst.pm.awk" "$keep/pve-cluster/src/pmxcfs/cfs-ipc-ops.h" >"$temporary/lib/PVE/Cluster/IPCConst.pm"
echo '1;' >>"$temporary/lib/PVE/Cluster/IPCConst.pm"
# The connection to pmxcfs, mail, and the scheduler by load, which are compiled: version 8 loads them, and the simulator does without.
mkdir -p "$temporary/lib/PVE/RS/ResourceScheduling"
for module in IPCC Notify RS::ResourceScheduling::Static; do
    echo "package PVE::$module; sub common_template_data { return {} } 1;" >"$temporary/lib/PVE/$(echo "$module" | sed 's|::|/|g').pm"
done

cat >"$temporary/here.toml" <<'TOML'
[device]
path = "/dev/sda"
[[vm]]
name = "plc"
proxmox = 100
cpu = { budget = "30ms", period = "100ms" }
[[vm.task]]
name = "t"
op = "read"
block = "4KiB"
rate = "100/s"
target = { percentile = "p99.99", latency = "60ms" }
TOML
for vm in 101:40 102:35 103:30 104:20 105:15; do
    sed -e "s/plc/vm${vm%:*}/; s/= 100\$/= ${vm%:*}/; s/30ms/${vm#*:}ms/" "$temporary/here.toml" >"$temporary/vm${vm%:*}.toml"
done
for node in 1 2 3; do
    printf '[[host]]\nname = "pve%s"\ntwin = "qlc-nvme"\n' "$node"
    [ "$node" != 2 ] || echo 'spec = "here.toml"'
done >"$temporary/fleet.toml"
for vm in 101 102 103 104 105; do printf '[[contracts]]\nspec = "vm%s.toml"\n' "$vm"; done >>"$temporary/fleet.toml"

cat >"$temporary/check.pl" <<'PERL'
use strict;
use warnings;
no warnings 'experimental';
use JSON;
use Text::ParseWords qw(shellwords);
use PVE::JSONSchema;
use PVE::Tools;
use PVE::HA::Groups;
use PVE::HA::Sim::TestHardware; # registers the kinds of rules and resources

my ($told, $dir) = @ARGV;
$told = decode_json(PVE::Tools::file_get_contents($told));
my $new = $told->{version} == 9;
my $plugins = $new ? 'PVE::HA::Rules' : 'PVE::HA::Groups';
my $config = { ids => {}, order => {} };
my $services = {};
# As ha-manager reads its command line.
my $options = sub { my ($schema, $words, @positional) = @_; PVE::JSONSchema::get_options($schema, $words, [@positional]) };
for my $rule ($told->{rules}->@*) {
    my $home = $rule->{nodes}->[0]->{node};
    $services->{ $rule->{resource} } = { node => $home, state => 'started' };
    for my $command ($rule->{commands}->@*) {
        my @words = shellwords($command);
        die "not for ha-manager: $command\n" if shift(@words) ne 'ha-manager';
        my $verb = shift @words;
        $verb .= ' ' . shift @words if $verb eq 'rules';
        if ($verb eq 'rules add' || $verb eq 'groupadd') {
            my $id = $new ? 'rule' : 'group';
            my $param = $options->($plugins->createSchema(), \@words, $new ? ('type', $id) : ($id));
            my ($type, $name) = ($new ? delete $param->{type} : 'group', delete $param->{$id});
            die "$name is there twice\n" if $config->{ids}->{$name};
            $config->{ids}->{$name} = $plugins->lookup($type)->check_config($name, $param, 1, 1);
            $config->{order}->{$name} = scalar keys $config->{ids}->%*;
        } elsif ($verb eq 'set' && !$new) {
            my $param = $options->(PVE::HA::Resources->updateSchema(), \@words, 'sid');
            my $sid = delete $param->{sid};
            die "$sid: no such group\n" if !$config->{ids}->{ $param->{group} };
            $services->{$sid}->{group} = $param->{group};
        } else {
            die "no command of this version: $command\n";
        }
    }
}
my %nodes = map { $_->{node} => 1 } map { $_->{nodes}->@* } $told->{rules}->@*;
my ($runs, $moved) = (0, 0);
for my $lost ('', sort keys %nodes) {
    my $test = "$dir/without-" . ($lost || 'none');
    mkdir $test or die "$test: $!\n";
    my $write = sub { PVE::Tools::file_set_contents("$test/$_[0]", ref($_[1]) ? encode_json($_[1]) : $_[1]) };
    $write->($new ? 'rules_config' : 'groups', $plugins->write_config('config', $config));
    $write->('service_config', $services);
    $write->('manager_status', {});
    $write->('hardware_status', { map { $_ => { power => 'off', network => 'off' } } keys %nodes });
    $write->('cmdlist', [ [ map { "power $_ on" } sort keys %nodes ], $lost ? ["power $lost off"] : () ]);
    system("perl pve-ha-tester $test >$test/output 2>&1") == 0 or die "the simulator failed: see $test/output\n";
    my $status = decode_json(PVE::Tools::file_get_contents("$test/status/manager_status"))->{service_status};
    for my $rule ($told->{rules}->@*) {
        my ($want) = grep { $_ ne $lost } map { $_->{node} } $rule->{nodes}->@*;
        my $is = $status->{ $rule->{resource} };
        die "$rule->{resource} is $is->{state} on $is->{node} without '$lost', not on $want\n"
            if $is->{node} ne $want || $is->{state} ne 'started';
        $moved++ if $want ne $rule->{nodes}->[0]->{node};
    }
    $runs++;
}
die "nothing was moved\n" if !$moved;
print "proxmox: version $told->{version}: " . @{ $told->{rules} } . " VMs, $runs simulations, $moved VMs moved to where they were admitted\n";
PERL

cargo build -q -p rtvirtio
program=${CARGO_TARGET_DIR:-target}/debug/rtvirtio
for version in 8 9; do
    "$program" fleet "$temporary/fleet.toml" --proxmox=$version --json >"$temporary/told-$version.json"
    case $version in 9) source=$keep/pve-ha-manager ;; 8) source=$eight ;; esac
    mkdir "$temporary/runs-$version"
    libraries=$temporary/lib:$source/src:$keep/pve-common/src:$keep/pve-cluster/src:$keep/perl/usr/share/perl5

    for versioned in "$keep"/perl/usr/lib/*/perl5/*; do libraries=$libraries:$versioned; done
    (cd "$source/src" && PERL5LIB=$libraries perl "$temporary/check.pl" "$temporary/told-$version.json" "$temporary/runs-$version")
done
