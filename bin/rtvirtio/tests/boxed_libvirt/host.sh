# What Debian's packages bring on a host with systemd: users, D-Bus, systemd-machined, libvirtd. Read by check.sh.
libraries=/usr/lib/x86_64-linux-gnu/libvirt
mkdir -p $libraries/connection-driver $libraries/storage-file /usr/share/dbus-1/system-services /etc/dbus-1 /etc/libvirt \
    /var/lib /var/log /var/cache /run/systemd/machines /run/systemd/machine /run/systemd/userdb
mv /usr/local/bin/libvirt_driver_qemu.so $libraries/connection-driver
mv /usr/local/bin/libvirt_storage_file_fs.so $libraries/storage-file
ln -s /usr/local/bin/rtvirtiod /usr/bin/rtvirtiod
cat >/etc/passwd <<END
root:x:0:0::/root:/bin/sh
libvirt-qemu:x:64055:64055::/:/bin/false
END
cat >/etc/group <<END
root:x:0:
libvirt-qemu:x:64055:
kvm:x:64056:
END
[ -s /etc/machine-id ] || tr -d - </proc/sys/kernel/random/uuid >/etc/machine-id

# Everybody may do everything: who may is not what is tested.
cat >/etc/dbus-1/system.conf <<END
<busconfig>
<type>system</type>
<listen>unix:path=/run/dbus/system_bus_socket</listen>
<auth>EXTERNAL</auth>
<servicedir>/usr/share/dbus-1/system-services</servicedir>
<policy context="default">
<allow user="*"/><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/>
</policy>
</busconfig>
END
cat >/usr/share/dbus-1/system-services/org.freedesktop.machine1.service <<END
[D-BUS Service]
Name=org.freedesktop.machine1
Exec=/bin/false
User=root
SystemdService=systemd-machined.service
END
cd /etc/systemd/system
for target in sysinit basic shutdown; do
    printf '[Unit]\nDefaultDependencies=no\n' >$target.target
done
cat >dbus.socket <<END
[Socket]
ListenStream=/run/dbus/system_bus_socket
END
cat >dbus.service <<END
[Unit]
Requires=dbus.socket
[Service]
ExecStart=/usr/local/bin/dbus-daemon --config-file=/etc/dbus-1/system.conf --address=systemd: --nofork --nopidfile --systemd-activation
StandardError=append:/root/dbus.log
END
cat >systemd-machined.service <<END
[Service]
BusName=org.freedesktop.machine1
ExecStart=/usr/local/bin/systemd-machined
StandardError=append:/root/machined.log
END
# No AppArmor here, and no virtlogd.
printf 'security_driver = "none"\nstdio_handler = "file"\n' >/etc/libvirt/qemu.conf
printf 'auth_unix_rw = "none"\nauth_unix_ro = "none"\nlog_outputs = "2:stderr"\n' >/etc/libvirt/libvirtd.conf
cat >libvirtd.service <<END
[Unit]
After=dbus.service
Requires=dbus.service
[Service]
Type=notify
ExecStart=/usr/local/bin/libvirtd
KillMode=process
Delegate=yes
StandardError=append:/root/libvirtd.log
END
cp /root/rtvirtiod.service .
cd /root
systemctl daemon-reload
# Its emulation hangs the box now and then, and libvirtd tries it.
rm -f /dev/kvm
for service in dbus systemd-machined libvirtd; do
    systemctl start $service.service
    echo "started $service ($(cut -d . -f 1 /proc/uptime) s)"
done
