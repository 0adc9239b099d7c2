// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

func TestServiceManagerHearsWhatTheDaemonDoes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	must(t, err)
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	hear := func(want string) {
		t.Helper()
		b := make([]byte, 1000)
		must(t, l.SetReadDeadline(time.Now().Add(10*time.Second)))
		n, err := l.Read(b)
		if err != nil || !strings.HasPrefix(string(b[:n]), want) {
			t.Fatalf("heard %q, error %v, want %q", b[:n], err, want)
		}
	}
	f := launch(t, "")
	hear("READY=1")
	f.reloaded(t, "")
	hear("RELOADING=1\nMONOTONIC_USEC=")
	hear("READY=1")
	f.write(t, "what: is this\n")
	if _, err := f.Reload(); err == nil {
		t.Error("nonsense was loaded")
	}
	hear("RELOADING=1\nMONOTONIC_USEC=")
	hear("READY=1") // with what it had
	must(t, f.Close(context.Background()))
	hear("STOPPING=1")
}

// Interfaces of one name in two network namespaces are two.
func TestTwoInterfaces(t *testing.T) {
	var labs [2]*netns.Lab
	text := "socket: " + t.TempDir() + "/s\ninterfaces:\n"
	for i := range labs {
		labs[i] = netnstest.Temp(t, netns.LabConfig{})
		text += fmt.Sprintf("- {name: %s, netns: %s, hpus: 1}\n", labs[i].NIC.Device, labs[i].NIC.Namespace)
	}
	text += "contexts:\n"
	for i, lab := range labs {
		text += echoes(fmt.Sprint("c", i), 7+i, fmt.Sprintf("interface: %s/%s, first: 1", lab.NIC.Namespace, lab.NIC.Device))
	}
	cfg, err := Load(writeFile(t, filepath.Join(t.TempDir(), "x.yaml"), text))
	must(t, err)
	d, err := Start(cfg, Options{KeepPrivileges: true, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	defer func() { must(t, d.Close(context.Background())) }()
	for i, lab := range labs {
		if got, err := exchange(t, lab, 7+i, "hello"); err != nil || got != "hello" {
			t.Errorf("interface %d answers %q, error %v", i, got, err)
		}
	}
	s, err := d.stats()
	must(t, err)
	if len(s) != 2 || s[0].Interface == s[1].Interface || len(s[0].Contexts) != 1 || s[0].Contexts[0].Name != "c0" {
		t.Errorf("statistics %+v", s)
	}
	all := d.infos()
	if len(all) != 2 || all[1].Interface != labs[1].NIC.Namespace+"/"+labs[1].NIC.Device || all[1].Rules[0].Number != 1 {
		t.Errorf("contexts %+v", all)
	}
}
